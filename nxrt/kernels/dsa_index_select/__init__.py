"""DsaIndexSelect: the token indexer of DeepSeek Sparse Attention, at GLM-5.2 geometry."""
