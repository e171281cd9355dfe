"""Index streams: how a loader's samples are dealt out to ranks. Nobody's constructor runs again."""
