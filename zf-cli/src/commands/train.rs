//! `zf train`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use zf_core::checkpoint::{Checkpoint, list};
use zf_core::config::{self, DeviceKind, Run};
use zf_core::cores::{self, Cores};
use zf_core::engine::{OffloadStages, Stages};
use zf_core::record::METRICS;
use zf_core::registry::{BuildContext, Registry};
use zf_core::stage::{Fabric, Keeps, OffloadPolicy, Selector};
use zf_core::train::{Resume, Stop, Training};
use zf_core::{Error, slots};

use crate::progress::{Progress, print_summary};

/// Trains as the run file says.
///
/// # Errors
/// Those of the run file, of the data and model, and of the run.
pub fn run(file: &Path, overrides: &[String], out: Option<&Path>, resume: Option<&str>) -> anyhow::Result<()> {
    let registry = Registry::global()?;
    let run = config::load(Some(file), overrides, registry)?;
    let fabric = run.build::<slots::Transport>(registry, &run.context())?;
    launched_alone(&*fabric, |name| std::env::var(name).ok())?;
    let start = agreed_start(&*fabric, || Start::new(run.name(), out, resume))?;
    let resume = start.resume.as_deref().map(|path| Resume::new(Checkpoint::open(path)?)).transpose()?;
    let stop = Stop::default();
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // A second signal ends the program at once.
        signal_hook::flag::register_conditional_shutdown(signal, 130, stop.flag())?;
        signal_hook::flag::register(signal, stop.flag())?;
    }
    let leads = fabric.leads();
    let training = training_on(fabric, &run, registry, start.folder, resume, stop)?;
    let mut progress = Progress::new();
    let result = training.run(&mut progress);
    progress.close();
    let summary = result?;
    if leads {
        print_summary(&summary, &training.folder);
    }
    Ok(())
}

/// Refuses to run all ranks in each of several processes that a launcher started.
fn launched_alone(fabric: &dyn Fabric, variable: impl Fn(&str) -> Option<String>) -> Result<(), Error> {
    let (Some(rank), Some(world)) = (variable("RANK"), variable("WORLD_SIZE")) else { return Ok(()) };
    if world.parse().is_ok_and(|world: usize| world > 1) && fabric.local_ranks().len() == fabric.world() {
        return Err(Error::Config(format!(
            "a launcher started this process as rank {rank} of {world}, but the transport runs all ranks in one process; \
             set transport.kind = \"c10d\", or start `zf train` without a launcher"
        )));
    }
    Ok(())
}

/// Where a run writes and what it goes on from: the same for all its processes.
#[derive(Debug, Serialize, Deserialize)]
struct Start {
    folder: PathBuf,
    resume: Option<PathBuf>,
}

impl Start {
    /// Decides, from what the user asked for and what is on disk.
    fn new(name: &str, out: Option<&Path>, resume: Option<&str>) -> Result<Self, Error> {
        let folder = out.map_or_else(|| default_folder(name), Path::to_path_buf);
        creatable(&folder)?;
        let resume = resume.map(|from| checkpoint(from, &folder)).transpose()?.flatten();
        if resume.is_none() && folder.join(METRICS).exists() && !overwritable(&folder)? {
            return Err(Error::Config(format!(
                "{} already holds a run; go on with --resume auto, or name another folder with --out",
                folder.display()
            )));
        }
        Ok(Self { folder, resume })
    }
}

/// Has the process of rank 0 decide; the others hear of its decision, or why there is none.
fn agreed_start(fabric: &dyn Fabric, decide: impl FnOnce() -> Result<Start, Error>) -> anyhow::Result<Start> {
    let decided = if fabric.leads() { Some(decide()) } else { None };
    let said: Option<Result<&Start, String>> =
        decided.as_ref().map(|decided| decided.as_ref().map_err(ToString::to_string));
    let heard = fabric.agree(serde_json::to_vec(&said)?)?;
    if let Some(decided) = decided {
        return Ok(decided?);
    }
    match serde_json::from_slice::<Option<Result<Start, String>>>(&heard)? {
        Some(Ok(start)) => Ok(start),
        Some(Err(reason)) => Err(Error::Config(format!("rank 0: {reason}")).into()),
        None => Err(Error::comm("rank 0 did not say where the run is").into()),
    }
}

/// Puts the pieces of a run file together, to be run with [`Training::run`].
///
/// # Errors
/// Those of the stages' settings, with place and caret.
pub fn training(
    run: &Run,
    registry: &Registry,
    folder: PathBuf,
    resume: Option<Resume>,
    stop: Stop,
) -> anyhow::Result<Training> {
    let fabric = run.build::<slots::Transport>(registry, &run.context())?;
    training_on(fabric, run, registry, folder, resume, stop)
}

/// The same on ranks that are there already.
fn training_on(
    fabric: Arc<dyn Fabric>,
    run: &Run,
    registry: &Registry,
    folder: PathBuf,
    resume: Option<Resume>,
    stop: Stop,
) -> anyhow::Result<Training> {
    let mut context = run.context();
    let model = run.build::<slots::Model>(registry, &context)?;
    context.model_folder = model.folder.clone();
    context.vocabulary = Some(model.model.vocabulary());
    let (offload, cores) = offload(run, registry, &context, fabric.local_ranks().len())?;
    Ok(Training {
        run: run.run.clone(),
        device: run.device.clone(),
        reduce: run.reduce.clone(),
        log: run.log.clone(),
        stages: Stages {
            partitioner: run.build::<slots::Partition>(registry, &context)?,
            optimizer: run.build::<slots::Optim>(registry, &context)?,
            schedule: run.build::<slots::Schedule>(registry, &context)?,
            offload,
        },
        host: run.host.clone(),
        cores,
        fabric,
        data: run.build::<slots::Data>(registry, &context)?,
        model,
        folder,
        resolved: run.resolved_toml(),
        command: std::env::args().collect(),
        resume,
        stop,
    })
}

/// The stages that keep states off the devices of `ranks` ranks, with the cores of devices and host work.
fn offload(
    run: &Run,
    registry: &Registry,
    context: &BuildContext,
    ranks: usize,
) -> anyhow::Result<(Option<OffloadStages>, Cores)> {
    let Some(stages) = offload_stages(run, registry, context)? else { return Ok((None, Cores::default())) };
    if let Some(threads) = run.host.threads.filter(|threads| !(1..=1024).contains(threads)) {
        return Err(run.error_at("host.threads", &format!("must be from 1 to 1024, found {threads}")).into());
    }
    let cores = match &run.host.cores {
        Some(host) if host.is_empty() => {
            return Err(run
                .error_at("host.cores", "names no core; take it out to leave the choice to the program")
                .into());
        }
        Some(host) => cores::split_with(ranks, host)?,
        None if run.device.kind == DeviceKind::Emulated => cores::split(ranks)?,
        None => Cores::default(),
    };
    Ok((Some(stages), cores))
}

/// The stages that keep states off the devices; none where all stay.
pub(super) fn offload_stages(
    run: &Run,
    registry: &Registry,
    context: &BuildContext,
) -> anyhow::Result<Option<OffloadStages>> {
    let offload = run.build::<slots::Offload>(registry, context)?;
    let policy = offload.policy();
    without_effect(run, policy.as_ref())?;
    if policy.is_none() {
        return Ok(None);
    }
    let selector = selector(run, registry, context)?;
    let links = match &run.device.link {
        Some(link) => {
            link.build("link", context).map_err(|error| run.error_at("device.link", &format!("{error:#}")))?
        }
        None => zf_offload::link::natural(),
    };
    Ok(Some(OffloadStages { offload, selector, links }))
}

/// What chooses columns, or would.
pub(super) fn selector(run: &Run, registry: &Registry, context: &BuildContext) -> Result<Arc<dyn Selector>, Error> {
    let selector = match run.given("select") {
        true => run.build::<slots::Select>(registry, context)?,
        false => registry.build::<slots::Select>(&toml::Table::new(), context)?,
    };
    Ok(Arc::from(selector))
}

/// Refuses or names sections that have no effect on the run.
fn without_effect(run: &Run, policy: Option<&OffloadPolicy>) -> Result<(), Error> {
    let chooses = policy.is_some_and(|policy| policy.keeps == Keeps::Chosen);
    if run.given("select") && !chooses {
        let message = "has no effect: only an offload that keeps chosen columns on the device, such as `offload.kind = \"zenflow\"`, \
                       chooses any";
        return Err(run.error_at("select", message));
    }
    // They describe the machine, which the cases of a sweep share; a run that uses less of it is no mistake.
    for key in ["host", "device.link"].into_iter().filter(|key| run.given(key) && policy.is_none()) {
        tracing::warn!("`{key}` has no effect without an offload");
    }
    Ok(())
}

/// The checkpoint that `--resume` names: of `auto` the newest whole one, or none where there is none.
fn checkpoint(from: &str, folder: &Path) -> Result<Option<PathBuf>, Error> {
    if from == "auto" {
        return newest_whole(&folder.join("checkpoints"));
    }
    let (path, run) = (Path::new(from), Path::new(from).join("checkpoints"));
    if !run.is_dir() {
        return Ok(Some(path.to_path_buf()));
    }
    // Only `auto` may go back to an older one.
    match list(&run)?.pop() {
        Some((_, newest)) => Ok(Some(newest)),
        None => Err(Error::Input(format!("{}: no checkpoint in it", run.display()))),
    }
}

/// The newest checkpoint whose checksums match; none where none was ever written.
fn newest_whole(root: &Path) -> Result<Option<PathBuf>, Error> {
    let mut wrong = Vec::new();
    for (_, path) in list(root)?.into_iter().rev() {
        match Checkpoint::open(&path).and_then(Resume::new) {
            Ok(_) => {
                wrong.iter().for_each(|error| tracing::warn!("passing over a checkpoint that is not whole: {error}"));
                return Ok(Some(path));
            }
            Err(error) => wrong.push(error),
        }
    }
    match wrong.first() {
        None => Ok(None),
        Some(error) => Err(Error::Input(format!("{}: no whole checkpoint in it: {error}", root.display()))),
    }
}

/// Refuses a run folder that cannot be one before anything is loaded for it.
pub(super) fn creatable(folder: &Path) -> Result<(), Error> {
    match folder.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir()) {
        None => Ok(()),
        Some(file) => Err(Error::Config(format!(
            "--out {}: {} is a file, not a folder; name another folder",
            folder.display(),
            file.display()
        ))),
    }
}

/// Whether a folder holds the metrics of a run that never came to a checkpoint.
fn overwritable(folder: &Path) -> Result<bool, Error> {
    let root = folder.join("checkpoints");
    Ok(!root.is_dir() || list(&root)?.is_empty())
}

/// `runs/<file>-<date>`, with a number where that exists.
pub(super) fn default_folder(name: &str) -> PathBuf {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (year, month, day) = zf_core::calendar::date(now / 86400);
    let (hour, minute, second) = (now / 3600 % 24, now / 60 % 60, now % 60);
    let base = format!("runs/{name}-{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}");
    (0..)
        .map(|number| PathBuf::from(if number == 0 { base.clone() } else { format!("{base}-{number}") }))
        .find(|path| !path.exists())
        .expect("numbers do not run out before folders do")
}
