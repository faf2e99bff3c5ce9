//! What the engine costs beside a plain loop: `cargo bench -p zf-tests --bench overhead`.
//!
//! Both train the same Llama from the same weights on the same batches in one process, step by step in turn, so that a
//! noisy machine disturbs both alike. The plain loop is forward, backward and libtorch's fused AdamW on leaf tensors.
//! Fails when the median step of the engine takes over 3 % more, or its peak memory is over 64 MB more.

use std::sync::Arc;
use std::time::Instant;

use tch::{Kind, Tensor};
use zf_core::engine::{Engine, EngineOptions, Stages};
use zf_core::layout::DType;
use zf_core::model::{Batch, Model};
use zf_core::random::RandomWeights;
use zf_core::stage::Fabric;
use zf_model::llama::{Family, Llama, LlamaConfig};
use zf_model::plain::PlainContext;
use zf_sys::heap::{Category, Heap, tag};

const LENGTH: i64 = 256;

fn main() -> anyhow::Result<()> {
    zf_sys::threads::set_operator_threads(1)?;
    let mut failed = false;
    for sequences in [1, 4] {
        failed |= !compare(sequences, if sequences == 1 { 25 } else { 9 })?;
    }
    anyhow::ensure!(!failed, "the engine costs more than allowed");
    Ok(())
}

/// Runs `pairs` steps of each and prints the medians; whether the limits hold.
fn compare(sequences: i64, pairs: usize) -> anyhow::Result<bool> {
    let config = serde_json::json!({
        "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": 4096, "tie_word_embeddings": false, "max_position_embeddings": LENGTH,
    });
    let model: Arc<dyn Model> = Arc::new(Llama::new(Family::Llama, serde_json::from_value::<LlamaConfig>(config)?)?);
    let weights = RandomWeights { seed: 1 };
    let plain_heap = Heap::new("plain")?;
    let mut plain = plain_heap.enter_with(|| Plain::new(&model, &weights))?;
    let engine_heap = Heap::new("engine")?;
    let mut engine = engine_heap.enter_with(|| engine(&model, &weights, sequences))?;

    let (mut plain_times, mut engine_times, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..pairs + 2 {
        let mut times = [0.0; 2];
        // Which of the two goes first alternates.
        for turn in [step % 2, 1 - step % 2] {
            let data = || batch(sequences, step);
            let start = Instant::now();
            if turn == 0 {
                plain_heap.enter_with(|| plain.step(&*model, &data()))?;
            } else {
                engine_heap.enter_with(|| engine.step(&mut |_| Ok(data())))?;
            }
            times[turn] = start.elapsed().as_secs_f64();
        }
        // The first steps fill caches.
        if step >= 2 {
            plain_times.push(times[0]);
            engine_times.push(times[1]);
            ratios.push(times[1] / times[0]);
        }
    }
    let (plain_time, engine_time, ratio) = (median(plain_times), median(engine_times), median(ratios));
    let (plain_peak, engine_peak) = (plain_heap.stats().peak, engine_heap.stats().peak);
    let more = (engine_peak - plain_peak) as f64 / 1e6;
    println!(
        "{sequences} x {LENGTH} tokens: plain {:.1} ms, engine {:.1} ms, paired ratio {ratio:.4}; peak {:.1} MB and {:.1} MB ({more:+.1} MB)",
        plain_time * 1e3,
        engine_time * 1e3,
        plain_peak as f64 / 1e6,
        engine_peak as f64 / 1e6
    );
    Ok(ratio <= 1.03 && more <= 64.0)
}

/// Runs with a heap as the current one.
trait EnterWith {
    fn enter_with<T>(&self, f: impl FnOnce() -> T) -> T;
}

impl EnterWith for Heap {
    fn enter_with<T>(&self, f: impl FnOnce() -> T) -> T {
        let _inside = self.enter();
        f()
    }
}

struct Plain {
    context: PlainContext,
    params: Vec<Tensor>,
    moments: Vec<Tensor>,
    variances: Vec<Tensor>,
    steps: Vec<Tensor>,
}

impl Plain {
    fn new(model: &Arc<dyn Model>, weights: &RandomWeights) -> anyhow::Result<Self> {
        let context = PlainContext::new(&**model, weights, Kind::Float, tch::Device::Cpu)?;
        let params: Vec<Tensor> = context.parameters().map(|(_, tensor)| tensor.shallow_clone()).collect();
        let zeros = || params.iter().map(Tensor::f_zeros_like).collect::<Result<Vec<_>, _>>();
        let steps = params.iter().map(|_| Tensor::from(0f32)).collect();
        Ok(Self { moments: zeros()?, variances: zeros()?, steps, params, context })
    }

    fn step(&mut self, model: &dyn Model, batch: &Batch) -> anyhow::Result<f64> {
        let loss = model.loss(&self.context, batch)?.sum.f_div_scalar(batch.target_tokens as f64)?;
        loss.f_backward()?;
        let _no_grad = tch::no_grad_guard();
        let grads: Vec<Tensor> = self.params.iter().map(Tensor::grad).collect();
        for step in &mut self.steps {
            let _ = step.f_add_scalar_(1.0)?;
        }
        zf_sys::fused::adamw(
            &self.params,
            &grads,
            &self.moments,
            &self.variances,
            &self.steps,
            1e-4,
            0.9,
            0.95,
            0.1,
            1e-8,
        )?;
        for param in &self.params {
            zf_sys::autograd::set_grad(param, None)?;
        }
        Ok(loss.f_double_value(&[])?)
    }
}

fn engine(model: &Arc<dyn Model>, weights: &RandomWeights, sequences: i64) -> anyhow::Result<Engine> {
    let fabric = zf_comm::Threads::new(&zf_comm::ThreadsConfig::default())?;
    let optimizer = zf_optim::AdamWConfig { lr: 1e-4, ..Default::default() };
    let stages = Stages {
        partitioner: Arc::new(zf_partition::ZeroConfig::stage(0).partitioner()?),
        optimizer: Arc::new(optimizer.rule()?),
        schedule: Arc::new(zf_optim::ConstantConfig::default().schedule()?),
        offload: None,
    };
    let options = EngineOptions::new(DType::Float32, (sequences * LENGTH) as u64, 1000);
    Ok(Engine::new(model.clone(), stages, options, fabric.connect(0)?, weights)?)
}

fn batch(sequences: i64, step: usize) -> Batch {
    let _tag = tag(Category::Buffers);
    let count = (sequences * LENGTH) as usize;
    let ids: Vec<i64> = (0..=count).map(|i| ((i * 7919 + step * 104_729) % 4096) as i64).collect();
    let tensor = |ids: &[i64]| Tensor::from_slice(ids).view([sequences, LENGTH]);
    Batch {
        inputs: tensor(&ids[..count]),
        targets: tensor(&ids[1..]),
        sequences: (0..sequences as u64).collect(),
        target_tokens: count as u64,
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
