"""Have the processes of a run agree: sums, flags, moments, through memory that they share."""
