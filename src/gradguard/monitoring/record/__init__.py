"""Store records: the file format, its writer and its readers, on plain numbers and without torch."""
