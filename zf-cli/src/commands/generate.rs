//! `zf generate`.

use std::io::Write;
use std::path::Path;

use tch::{Kind, Tensor};
use zf_core::Error;
use zf_core::model::Context;
use zf_core::random::{Stream, uniform_into};

use crate::open::Opened;

/// How tokens are chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// How many tokens.
    pub tokens: usize,
    /// Logits are divided by it; 0 takes the most likely token each time.
    pub temperature: f64,
    /// Only the most likely ones; 0: all.
    pub top_k: usize,
    /// Key of the randomness.
    pub seed: u64,
}

/// Prints the prompt and what the model makes of it, token by token.
///
/// # Errors
/// Those of the model; a temperature below 0.
pub fn run(model: &Path, prompt: &str, sampling: &Sampling, out: &mut dyn Write) -> anyhow::Result<()> {
    if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
        return Err(Error::Config(format!("--temperature must be 0 or more, found {}", sampling.temperature)).into());
    }
    let opened = Opened::new(model)?;
    let tokenizer = opened.tokenizer()?;
    let mut ids: Vec<i64> = tokenizer.start().iter().map(|&id| i64::from(id)).collect();
    ids.extend(tokenizer.encode(prompt, true)?.into_iter().map(i64::from));
    if ids.is_empty() {
        // A model needs a token to begin with: the end of a document, or a line break.
        ids.push(i64::from(tokenizer.eos().unwrap_or(u32::from(b'\n'))));
    }
    let limit = opened.model.max_length().unwrap_or(usize::MAX).min(opened.sequence_length.unwrap_or(usize::MAX));
    let context = opened.context()?;
    let _no_grad = tch::no_grad_guard();
    let mut stream = tokenizer.stream();
    write!(out, "{prompt}")?;
    for number in 0..sampling.tokens {
        let window = &ids[ids.len().saturating_sub(limit)..];
        let tokens = Tensor::f_from_slice(window)?.f_view([1, window.len() as i64])?.f_to_device(context.device())?;
        let logits = opened.model.next_logits(&context, &tokens)?.f_view([-1])?;
        let next = choose(&logits, sampling, number as u64)?;
        let id = u32::try_from(next)?;
        if tokenizer.stops().contains(&id) {
            break;
        }
        ids.push(next);
        write!(out, "{}", stream.push(id))?;
        out.flush()?;
    }
    writeln!(out, "{}", stream.finish())?;
    Ok(())
}

/// The next token, from logits `[vocabulary]`.
fn choose(logits: &Tensor, sampling: &Sampling, number: u64) -> anyhow::Result<i64> {
    if sampling.temperature == 0.0 {
        return Ok(logits.f_argmax(0, false)?.f_int64_value(&[])?);
    }
    let size = logits.size1()?;
    let kept = if sampling.top_k == 0 { size } else { i64::try_from(sampling.top_k).unwrap_or(size).min(size) };
    let (values, ids) = logits.f_to_kind(Kind::Float)?.f_topk(kept, 0, true, true)?;
    let shares = values.f_div_scalar(sampling.temperature)?.f_softmax(0, Kind::Double)?.f_cumsum(0, Kind::Double)?;
    let mut uniform = [0f32];
    uniform_into(&mut uniform, Stream::named(sampling.seed, "generate"), number, 0.0, 1.0);
    let below = shares.f_lt(f64::from(uniform[0]))?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
    Ok(ids.f_int64_value(&[below.min(kept - 1)])?)
}
