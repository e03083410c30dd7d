"""Files from elsewhere: the one room that opens, bounds and takes them apart, and that writes without half a file.

Nothing in it runs what a file says: plain numbers, text and raw blocks of bytes are all that comes out.
"""
