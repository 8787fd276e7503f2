"""`ElasticBuffer`: one dispatch and one combine whose form each call chooses."""
