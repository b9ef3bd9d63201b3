"""The command line. main.py has the commands; the others are one command each."""
