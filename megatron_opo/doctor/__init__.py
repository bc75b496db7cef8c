"""Is this machine fit? Every check is a function that returns findings; none of them raises, and
none imports what might be broken: that is done in a process of its own (`imports`)."""
