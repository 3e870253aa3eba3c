import os

import torch
from hypothesis import settings

torch.set_num_threads(1)

# before any test module imports triton: kernels are bound to the interpreter when they are defined
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# machines differ in speed; a run that gates a change must not differ from the last one by luck
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")
