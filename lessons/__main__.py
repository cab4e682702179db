"""python -m lessons NAME"""

from lessons.demos import main

main()
