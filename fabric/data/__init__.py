"""Index streams: how a loader's samples are dealt out to ranks, without running anyone's constructor again."""
