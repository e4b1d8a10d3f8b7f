import sys, importlib.util
sys.meta_path[:] = [f for f in sys.meta_path if "skbc" not in type(f).__module__ and "Scikit" not in type(f).__name__]
sys.path.insert(0, "/tmp/kern/.check")
import penstock; assert penstock.__file__.startswith("/tmp/kern/.check"), penstock.__file__
import penstock.store.quantize as q; print(q.__file__)
import pytest; sys.exit(pytest.main(sys.argv[1:]))
