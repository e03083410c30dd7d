"""``python -m gradguard`` is the ``gradguard`` command."""

import sys

from gradguard.cli import main

sys.exit(main())
