"""What a process of a job owes and knows: whom it dies with, its signals, its cores, what a fork inherits."""
