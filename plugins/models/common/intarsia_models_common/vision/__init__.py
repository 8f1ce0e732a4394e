"""Vision parts that families share: the tower that makes features of patches, and the language model that reads them in tokens' places. Torch-free here."""
