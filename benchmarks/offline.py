"""`rayllm bench offline` as a script: python benchmarks/offline.py --model DIR --workload nano256 [--json]"""

import sys

from rayllm.cli.main import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "offline"]
    main()
