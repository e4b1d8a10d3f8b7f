"""What all tests share: how hard Hypothesis searches, and which build of the extension is under test."""

import importlib.util
import os
import signal
import sys

from hypothesis import HealthCheck, settings

# Started in the background by a shell we ignore Ctrl-C, and our children would too; some tests send it to them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline in either: the two cores of a CI machine are shared, and an example that takes 10 ms can take 300.
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("fuzz", max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# `make fuzz` runs the native tests against a build with sanitizers, which is not the installed one.
if path := os.environ.get("PENSTOCK_NATIVE"):
    spec = importlib.util.spec_from_file_location("penstock._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["penstock._native"] = module
