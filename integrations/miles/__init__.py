"""Adapter: Miles. `policy_loss` for ``loss_type: custom_loss``, `tis_function` for ``--custom-tis-function-path``.

Installed as ``offpolicy_corr.integrations.miles``; Miles finds the functions by their dotted paths. Nothing here
imports Miles before it is called. `transport` carries extra keys where the installed Miles does not, `sampler_spec` and
`request_fields` serve a generate function of your own, and `check_main` is the command ``offpolicy-corr miles check``.
"""

from offpolicy_corr.settings import Settings, SettingsError

from .check import check_main
from .loss import policy_loss
from .sampling import request_fields, sampler_spec
from .tis import tis_function

__all__ = [
    "Settings",
    "SettingsError",
    "check_main",
    "policy_loss",
    "request_fields",
    "sampler_spec",
    "tis_function",
]
