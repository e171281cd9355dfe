"""Values that every layer may import: errors, topology, traits, policy, tree, registry. Needs only torch."""
