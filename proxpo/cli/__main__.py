import sys

from proxpo.cli import main

sys.exit(main())
