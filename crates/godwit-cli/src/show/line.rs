//! A line of text that shrinks to the available width.

/// The priority of a piece. Later variants are left out first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Matters {
    /// Shown at any width.
    Always,
    /// A problem.
    Trouble,
    /// Current step.
    Step,
    /// Amount left.
    Left,
    /// Names of the subject and of the other node.
    Names,
    /// Details about another piece.
    Detail,
    /// Shown on wide terminals only.
    Rest,
}

/// A piece of text for one place of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    place: usize,
    matters: Matters,
    text: String,
}

/// Pieces of text, separated by commas. A place may have several forms; a form of lower priority says more, and
/// replaces the shorter form if the width allows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line {
    pieces: Vec<Piece>,
    places: usize,
}

impl Line {
    /// Builds a line of one piece, shown at any width.
    pub(crate) fn plain(text: impl Into<String>) -> Self {
        Self::default().then(Matters::Always, text)
    }

    /// Appends a piece.
    pub(crate) fn then(self, matters: Matters, text: impl Into<String>) -> Self {
        self.then_or(&[(matters, text.into())])
    }

    /// Appends a place with several forms. The longest form that fits is shown.
    pub(crate) fn then_or(mut self, forms: &[(Matters, String)]) -> Self {
        let place = self.places;
        self.places += 1;
        self.pieces
            .extend(forms.iter().map(|(matters, text)| Piece {
                place,
                matters: *matters,
                text: text.clone(),
            }));
        self
    }

    /// Returns the pieces that fit into this many columns.
    pub(crate) fn within(&self, columns: usize) -> String {
        let mut pieces: Vec<&Piece> = self.pieces.iter().collect();
        pieces.sort_by_key(|piece| piece.matters);
        let mut told: Vec<Option<&str>> = vec![None; self.places];
        for piece in pieces {
            let before = told[piece.place].replace(&piece.text);
            if piece.matters > Matters::Always && columns < width(&told) {
                told[piece.place] = before;
            }
        }
        joined(&told)
    }

    /// Returns the columns of the shortest form.
    pub(crate) fn least(&self) -> usize {
        self.within(0).chars().count()
    }
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.within(usize::MAX))
    }
}

fn joined(told: &[Option<&str>]) -> String {
    let told: Vec<&str> = told.iter().copied().flatten().collect();
    told.join(", ")
}

// Names of disks and nodes are ASCII, and `µ` takes one column.
fn width(told: &[Option<&str>]) -> usize {
    joined(told).chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        Line::default()
            .then_or(&[
                (Matters::Step, "copying".to_owned()),
                (Matters::Names, "d: copying to b".to_owned()),
            ])
            .then(Matters::Rest, "3 pauses")
            .then(Matters::Always, "1 MiB/s")
    }

    #[test]
    fn what_matters_least_goes_first_and_what_must_stay_stays() {
        for (columns, text) in [
            (100, "d: copying to b, 3 pauses, 1 MiB/s"),
            (34, "d: copying to b, 3 pauses, 1 MiB/s"),
            (33, "d: copying to b, 1 MiB/s"),
            (23, "copying, 1 MiB/s"),
            (15, "1 MiB/s"),
            (0, "1 MiB/s"),
        ] {
            assert_eq!(line().within(columns), text, "{columns}");
        }
        assert_eq!(line().least(), 7);
        assert_eq!(line().to_string(), line().within(34));
    }

    #[test]
    fn a_piece_that_has_room_is_told_although_a_more_important_one_has_none() {
        let line = Line::plain("a")
            .then(Matters::Left, "a long one")
            .then(Matters::Rest, "b");
        assert_eq!(line.within(8), "a, b");
    }
}
