"""A program that begins again, then tells its arguments, its input and what it was begun with; exit code 3."""

import os
import sys

from transformer import huge_pages

if __name__ == "__main__":
    huge_pages.begin_again()
    print(sys.argv[1:], sys.stdin.read(), os.environ.get(huge_pages.VARIABLE))
    sys.exit(3)
