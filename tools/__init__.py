"""Programs for those who work on ModalMesh; none of them is part of the wheel."""
