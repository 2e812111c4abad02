"""Reading and writing checkpoints: safetensors with a `config.json` in Hugging Face names, and GGUF files.

A checkpoint is judged by its headers alone, name by name, before anything is allocated. Linear weights are stored
[out, in], which is how the models hold them, so a tensor only ever changes its dtype (and, in GGUF, the order of rows).
`places` finds a checkpoint, `families` knows the models, `safetensors_files` and `gguf_files` the formats.
"""

from models.checkpoints.errors import CheckpointError as CheckpointError
from models.checkpoints.families import Config as Config
from models.checkpoints.families import Model as Model
from models.checkpoints.families import config_from_json as config_from_json
from models.checkpoints.families import config_to_json as config_to_json
from models.checkpoints.families import expected_shapes as expected_shapes
from models.checkpoints.loading import load as load
from models.checkpoints.loading import locate as locate
from models.checkpoints.loading import read_config as read_config
from models.checkpoints.loading import save as save
from models.checkpoints.places import FETCHED as FETCHED
from models.checkpoints.places import SHIPPED as SHIPPED
from models.checkpoints.places import cache_folder as cache_folder
from models.checkpoints.places import resolve as resolve
