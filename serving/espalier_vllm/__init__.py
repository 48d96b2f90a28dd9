"""The plugin: tells transformers and vLLM of Espalier's flat form. Nothing here imports vLLM's layers."""

VERSION = "0.1.0"
ARCHITECTURE = "EspalierForCausalLM"


class Unsupported(ValueError):
    """What the class cannot serve, whoever tries again: the field or tensor, its value, what was expected."""


def register():
    """Registers config and model class. vLLM calls it in each of its processes; calling it again changes nothing."""
    from espalier_hf.configuration_espalier import EspalierConfig
    from transformers import AutoConfig
    from vllm import ModelRegistry

    AutoConfig.register(EspalierConfig.model_type, EspalierConfig, exist_ok=True)
    # By name, so that no process touches a device before vLLM asks for the class.
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"espalier_vllm.model:{ARCHITECTURE}")
