"""Third-party engines, one folder each. Registries load them by name: no other module imports them."""
