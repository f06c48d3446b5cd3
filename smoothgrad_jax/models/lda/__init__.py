"""Latent Dirichlet allocation.

| module            | contents                                                                          |
|-------------------|-----------------------------------------------------------------------------------|
| ``model``         | the model: priors, local step, evidence lower bound, held-out score               |
| ``topics``        | topics to start from, and expected topics                                         |
| ``document_fit``  | the fixed point of one document, as loops that XLA fuses                          |
| ``row_kernel``    | the same for the row-sparse engine                                                |
| ``inference``     | topic proportions and scores of any number of documents, topics held fixed        |
| ``priors``        | priors learned from what was inferred                                             |
"""
