"""The mask explorer: a mask as one JSON document, and one HTML file that evaluates it without a server."""

from longspan.explorer.document import document as document
