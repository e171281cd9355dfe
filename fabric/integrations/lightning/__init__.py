"""Private helpers, flags and aliases of Lightning Fabric that programs import."""
