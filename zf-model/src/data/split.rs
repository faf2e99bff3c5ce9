//! Cutting a stream of tokens into sequences, and these into training and validation.

use zf_core::model::IGNORE;
use zf_core::{Error, Result};

use super::segment::Stream;

/// The sequences of one split.
#[derive(Debug)]
pub(super) enum Part {
    /// Sequence i is `tokens[first + i*L .. first + i*L + L]`, targets one further.
    Packed {
        /// The stream position of the first token.
        first: u64,
        /// Number of sequences.
        sequences: u64,
    },
    /// One document each.
    Rows(Vec<Row>),
}

/// A document that is read as one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    /// The stream position of its first token.
    start: u64,
    /// Its tokens, of which the last is only a target.
    tokens: u32,
}

/// All documents of a stream as rows, and what was done to them.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// The usable documents.
    pub(super) rows: Vec<Row>,
    /// How many were longer than a sequence.
    pub(super) cut: u64,
    /// How many have no target that counts.
    pub(super) useless: u64,
}

impl Part {
    /// Number of sequences.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Packed { sequences, .. } => *sequences,
            Self::Rows(rows) => rows.len() as u64,
        }
    }

    /// Reads sequence `index`, which must exist. What a document does not fill has `pad` as input and no target.
    pub(super) fn read(
        &self,
        stream: &Stream,
        index: u64,
        pad: i64,
        inputs: &mut [i64],
        targets: &mut [i64],
    ) -> Result<()> {
        let length = inputs.len();
        let (start, tokens) = match self {
            Self::Packed { first, .. } => (first + index * length as u64, length + 1),
            Self::Rows(rows) => {
                let row = rows[index as usize];
                inputs.fill(pad);
                targets.fill(IGNORE);
                (row.start, row.tokens as usize)
            }
        };
        stream.visit(start, tokens, |at, id, counts| {
            if at + 1 < tokens {
                inputs[at] = i64::from(id);
            }
            if at > 0 {
                targets[at - 1] = if counts { i64::from(id) } else { IGNORE };
            }
        })
    }
}

/// The packed sequences of a whole stream.
pub(super) fn packed(stream: &Stream, length: usize, what: &str) -> Result<Part> {
    let sequences = stream.tokens().saturating_sub(1) / length as u64;
    if sequences == 0 {
        return Err(too_short(stream.tokens(), length as u64 + 1, what));
    }
    Ok(Part::Packed { first: 0, sequences })
}

/// Training sequences from the beginning of a stream, and about `fraction` of all, at least one, from its end. The
/// last target of training is no token of validation.
pub(super) fn packed_split(stream: &Stream, length: usize, fraction: f64, what: &str) -> Result<(Part, Part)> {
    let (tokens, length) = (stream.tokens(), length as u64);
    // A part of n sequences takes n * length + 1 tokens.
    let all = tokens.saturating_sub(1) / length;
    let wanted = share(all, fraction);
    let sequences = tokens.saturating_sub(wanted * length + 2) / length;
    if sequences == 0 {
        return Err(too_short(tokens, (wanted + 1) * length + 2, what));
    }
    let first = sequences * length + 1;
    let train = Part::Packed { first: 0, sequences };
    let validation = Part::Packed { first, sequences: (tokens - first - 1) / length };
    Ok((train, validation))
}

/// The documents of a stream as rows of at most `length` inputs.
pub(super) fn rows(stream: &Stream, length: usize) -> Result<Rows> {
    let mut found = Rows::default();
    for (index, segment) in stream.segments().iter().enumerate() {
        let Some(documents) = segment.documents() else {
            return Err(Error::Config(format!(
                "data.pack = false needs documents, and {} is bare tokens; use data.pack = true",
                segment.origin().display()
            )));
        };
        let mut from = 0;
        for document in 0..documents {
            let to = segment.document_end(document);
            let tokens = (to - from).min(length as u64 + 1);
            // Only a target that counts teaches something, and the first token is no target.
            let mut targets = segment.ids(from, from + tokens).skip(1);
            let useful = if segment.masked() { targets.any(|(_, counts)| counts) } else { targets.next().is_some() };
            if useful {
                found.cut += u64::from(tokens < to - from);
                found.rows.push(Row {
                    start: stream.start(index) + from,
                    tokens: u32::try_from(tokens)
                        .map_err(|_| Error::Config("data.sequence_length must be below 2^32".into()))?,
                });
            } else {
                found.useless += 1;
            }
            from = to;
        }
    }
    Ok(found)
}

/// Takes the validation rows, about `fraction` of all, at least one, from the end.
pub(super) fn rows_split(mut rows: Vec<Row>, fraction: f64, what: &str) -> Result<(Part, Part)> {
    let wanted = share(rows.len() as u64, fraction);
    if rows.len() as u64 <= wanted {
        return Err(Error::Input(format!(
            "{what}: {} usable documents are too few to keep {wanted} for validation",
            rows.len()
        )));
    }
    let validation = rows.split_off(rows.len() - wanted as usize);
    Ok((Part::Rows(rows), Part::Rows(validation)))
}

fn share(all: u64, fraction: f64) -> u64 {
    ((all as f64 * fraction).round() as u64).max(1)
}

fn too_short(tokens: u64, needed: u64, what: &str) -> Error {
    Error::Input(format!(
        "{what}: the text is too short: {tokens} tokens, at least {needed} are needed; use more text or a smaller \
         data.sequence_length"
    ))
}
