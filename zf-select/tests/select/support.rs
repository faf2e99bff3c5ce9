//! What the tests share.

use zf_core::registry::{BuildContext, Registry};
use zf_core::stage::{Candidates, Selector};
use zf_core::{Result, slots};
use zf_select as _;

pub(crate) fn table(text: &str) -> toml::Table {
    text.parse().expect("the test's own TOML")
}

/// The selector of a section `[select]`.
pub(crate) fn build_in(text: &str, cx: &BuildContext) -> Result<Box<dyn Selector>> {
    Registry::global().expect("no duplicates").build::<slots::Select>(&table(text), cx)
}

pub(crate) fn build(text: &str) -> Box<dyn Selector> {
    build_in(text, &BuildContext::default()).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The error of a section that is wrong.
pub(crate) fn refused(text: &str) -> String {
    build_in(text, &BuildContext::default()).err().unwrap_or_else(|| panic!("{text} was accepted")).to_string()
}

/// A weight `w` at update 0, nothing chosen so far.
pub(crate) fn weight(scores: &[f64]) -> Candidates<'_> {
    Candidates { name: "w", columns: scores.len(), scores, previous: &[], update: 0 }
}

/// What the selector chooses from these scores.
pub(crate) fn chosen(selector: &mut dyn Selector, scores: &[f64]) -> Vec<u32> {
    selector.choose(&weight(scores)).expect("an answer")
}
