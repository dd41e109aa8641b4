"""Images of prompts, prepared once for all services: scaled once, then cut into the patches that a vision tower reads.

An image file is decoded and scaled where its prompt comes in, and travels as a PNG file of the size that the model
reads. So generators and trainer cut the same bytes into the same patches, whatever libraries they have. The numbers
are those of the image processor of Qwen's vision models (Qwen2-VL, arXiv:2409.12191), which others have taken over.
"""

from schemas.images.patches import cut_patches, image_size, join_patches, prepare_image, probe_image
from schemas.images.settings import ImageSettings, read_image_settings
