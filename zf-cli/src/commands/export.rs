//! `zf export`.

use std::io::Write;
use std::path::Path;

use crate::open::Opened;

/// Writes the model of a run as a Hugging Face folder, in the type it was trained in.
///
/// # Errors
/// A target that exists and is not empty; those of the run.
pub fn run(run: &Path, to: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    let opened = Opened::new(run)?;
    let kind = opened.dtype.kind();
    zf_model::folder::export(to, &*opened.model, opened.dtype, &mut |spec| {
        Ok(opened.weights.load(spec)?.f_to_kind(kind)?)
    })?;
    writeln!(out, "{}", to.display())?;
    Ok(())
}
