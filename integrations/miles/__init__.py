"""Miles: `policy_loss` for ``loss_type: custom_loss``.

Installed as ``offpolicy_corr.integrations.miles``; Miles finds the functions by their dotted paths. Nothing here
imports Miles before it is called.
"""

from .loss import policy_loss
from .settings import Settings, SettingsError

__all__ = ["Settings", "SettingsError", "policy_loss"]
