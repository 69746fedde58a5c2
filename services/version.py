"""The version of the product: of the distribution, the images and what `millstream version` prints."""

VERSION = "0.1.0"
