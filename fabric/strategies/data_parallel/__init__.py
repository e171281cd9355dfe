"""One process whose batch is divided over its devices."""
