"""Is the norm that an engine computes, reports and applies the true one? From what the processes hold."""
