"""Other people's engines, a folder each. Nobody imports them: a registry names them by a string."""
