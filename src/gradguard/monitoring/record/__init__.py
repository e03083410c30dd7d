"""Records: the format of the file, its writer, its readers, and what one step says. Plain numbers, without torch."""
