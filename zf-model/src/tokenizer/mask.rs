//! Which part of a rendered conversation the assistant wrote.

use std::ops::Range;

use zf_core::{Error, Result};

use super::template::{CLOSE, ChatTemplate, OPEN};
use super::{Message, clock};

/// The rendered conversation and the byte ranges of it that are the assistant's, ascending.
pub(super) fn spans(template: &ChatTemplate, messages: &[Message]) -> Result<(String, Vec<Range<usize>>)> {
    if template.marked {
        return Ok(strip(&template.render_marked(messages, false, clock::FIXED)?));
    }
    let full = template.render(messages, false, clock::FIXED)?;
    let mut spans = Vec::new();
    for (at, message) in messages.iter().enumerate() {
        if message.role == "assistant" {
            spans.push(turn(template, messages, at, &full)?);
        }
    }
    Ok((full, spans))
}

/// Whether byte `at` lies in one of the ranges.
pub(super) fn covers(spans: &[Range<usize>], at: usize) -> bool {
    let next = spans.partition_point(|span| span.end <= at);
    spans.get(next).is_some_and(|span| span.contains(&at))
}

/// The range of message `at` in `full`: from the end of the opening of its turn to the end of what it adds.
fn turn(template: &ChatTemplate, messages: &[Message], at: usize, full: &str) -> Result<Range<usize>> {
    let opening = template.render(&messages[..at], true, clock::FIXED)?;
    let through = template.render(&messages[..=at], false, clock::FIXED)?;
    if full.starts_with(&opening) && through.starts_with(&opening) {
        if full.starts_with(&through) {
            return Ok(opening.len()..through.len());
        }
        // Some templates print the last turn in another way than earlier ones (Qwen3 drops its reasoning): then the
        // turn ends where its content and the same closing follow each other.
        let content = message_text(&messages[at]);
        if let (Some(found), Some(last)) = (full[opening.len()..].find(content), through.rfind(content)) {
            let end = opening.len() + found + content.len();
            let closing = &through[last + content.len()..];
            if full[end..].starts_with(closing) {
                return Ok(opening.len()..end + closing.len());
            }
        }
    }
    Err(Error::Input(format!(
        "{}: the chat template changes earlier turns, so that the assistant's tokens of message {at} cannot be told; \
         mark them in the template with {{% generation %}} ... {{% endgeneration %}}",
        template.origin()
    )))
}

fn message_text(message: &Message) -> &str {
    message.content.trim()
}

/// Takes the brackets out and returns what they enclosed.
fn strip(marked: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(marked.len());
    let mut spans = Vec::new();
    let mut from = 0;
    for c in marked.chars() {
        match c {
            OPEN => from = text.len(),
            CLOSE => spans.push(from..text.len()),
            _ => text.push(c),
        }
    }
    (text, spans)
}
