"""Data loaders: sharding over ranks and positions. No constructor of a user's class is called again."""
