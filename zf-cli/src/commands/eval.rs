//! `zf eval`.

use std::io::Write;
use std::path::Path;

use zf_core::data::{Order, OrderKind, Split, Turn, assemble};
use zf_core::model::Context;
use zf_core::registry::{Build, BuildContext};
use zf_model::data::DataConfig;

use crate::open::Opened;

/// Sequences evaluated at once.
const BATCH: u64 = 4;

/// Prints loss and perplexity of a model on a text.
///
/// # Errors
/// Those of the model and the data.
pub fn run(model: &Path, data: &Path, length: Option<usize>, out: &mut dyn Write) -> anyhow::Result<()> {
    let opened = Opened::new(model)?;
    let missing = || zf_core::Error::Input(format!("--data {}: no such file or folder", data.display()));
    anyhow::ensure!(data.exists(), missing());
    let length = length.or(opened.sequence_length).unwrap_or(256);
    let length = opened.model.max_length().map_or(length, |limit| length.min(limit));
    let mut config = DataConfig::new(std::path::absolute(data)?, length);
    config.order = OrderKind::Sequential;
    let context = BuildContext {
        model_folder: opened.folder.clone(),
        vocabulary: Some(opened.model.vocabulary()),
        ..BuildContext::default()
    };
    let dataset = config.build(&context)?.dataset;
    let total = dataset.len(Split::Train);
    let order = Order::new(total, 0, OrderKind::Sequential);
    let plain = opened.context()?;
    let _no_grad = tch::no_grad_guard();
    let (mut loss, mut tokens) = (0.0, 0u64);
    for first in (0..total).step_by(BATCH as usize) {
        let sequences = (first..total.min(first + BATCH)).collect();
        let turn = Turn { index: first / BATCH, first_position: first, sequences };
        let batch = assemble(&*dataset, &order, Split::Train, &turn, plain.device())?;
        loss += opened.model.loss(&plain, &batch)?.sum.f_double_value(&[])?;
        tokens += batch.target_tokens;
    }
    anyhow::ensure!(tokens > 0, zf_core::Error::Input(format!("{}: no target token in it", data.display())));
    let mean = loss / tokens as f64;
    writeln!(out, "tokens      {tokens} in sequences of {length}")?;
    writeln!(out, "loss        {mean:.6}")?;
    writeln!(out, "perplexity  {:.4}", mean.exp())?;
    Ok(())
}
