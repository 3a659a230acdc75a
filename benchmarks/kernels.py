"""`rayllm bench kernels` as a script: python benchmarks/kernels.py [NAME]... [--json]"""

import sys

from rayllm.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "kernels"]
    main()
