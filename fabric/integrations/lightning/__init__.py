"""Lightning Fabric's private helpers, flags and aliases that programs import, in terms of ours."""
