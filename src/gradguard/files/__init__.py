"""Read files of unknown origin, and write files in one piece. The formats themselves belong to other packages.

A reader opens a regular file (`opening`), parses bounded JSON (`json_text`), and checks each field by a table of rules
(`foreign_fields`); tensors are raw bytes after a JSON header (`blocks`). A writer fills a file or a directory under
another name and renames it at the end (`writing`).

**Guarantees.** No content of a file is run: the results are plain numbers, text and bytes. Sizes are compared with the
length of the file before memory is allocated. A file that violates its format is refused by a ValueError.
"""
