"""What some tests need, and are not collected without: a Docker engine (`make test-images`), or Prometheus.

Prometheus and its promtool are those of the PATH; Debian's package `prometheus` has both.
"""

import os
import shutil

collect_ignore = [] if os.environ.get("TEST_IMAGES") else ["test_images.py", "test_stack.py"]
if not (shutil.which("prometheus") and shutil.which("promtool")):
    collect_ignore += ["test_rules.py", "test_monitoring.py"]
