"""python -m lessons NAME"""

from lessons.demos import main

if __name__ == "__main__":
    main()
