# SPDX-License-Identifier: Apache-2.0
"""The probes; what they are asked is a JSON object on their standard input.

``lmcache``: LMCache's build, settings and server, beside a torch without torch-rbln.
``runtime``: torch with torch-rbln, RDS and vLLM, the safest first.
"""

# Standard
import json
import os
import sys

# Local
from lmcache_rbln.diagnose import connector, npu, packages, server, settings
from lmcache_rbln.diagnose.probe import tell

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    if sys.argv[1] == "lmcache":
        environment = dict(os.environ) | asked["environment"]
        tell("build", packages.examine_build)
        tell(
            *("settings", settings.examine, environment, asked["connector"]),
            *(asked["extra"], asked["block_size"]),
        )
        tell("server", server.ask, asked["server"], asked["timeout"])
    else:
        tell("torch", npu.examine_torch)
        tell("rds", npu.examine_rds)
        tell("vllm", connector.ask_vllm, asked["config"])
    # Whatever threads still run, and without torch-rbln's clean-up.
    os._exit(0)
