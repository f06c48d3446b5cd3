"""Latent Dirichlet allocation.

| module                | contents                                                                          |
|-----------------------|-----------------------------------------------------------------------------------|
| ``model``             | the model: priors, local step, evidence lower bound, held-out score               |
| ``methods``           | the local steps by name, and when to use which                                    |
| ``execution``         | one document after the other, or all at once                                      |
| ``local_steps``       | how each of them is computed, for the dense functions and for the row kernel      |
| ``document_fit``      | the fixed point of one document, as loops that XLA fuses                          |
| ``document_collapsed``| the same for collapsed variational inference (CVB0)                               |
| ``document_sampling`` | Gibbs sampling of the topics of one document's tokens                             |
| ``batch_entries``     | the entries of a minibatch as arrays for all documents at once                    |
| ``batch_fit``, …      | ``document_fit``, ``document_collapsed`` and ``document_sampling`` on these arrays |
| ``row_kernel``        | the local steps on the row-sparse engine                                          |
| ``topics``            | topics to start from, and expected topics                                         |
| ``inference``         | topic proportions and scores of any number of documents, topics held fixed        |
| ``priors``            | priors learned from documents and topics                                          |
"""
