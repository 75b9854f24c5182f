"""The commands of the installed package, a file each."""
