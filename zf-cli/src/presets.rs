//! The built-in presets: named sets of stages that a run file builds on with `preset = "name"`.

zf_core::register_preset!(
    "zero-0",
    "plain data parallelism: every rank holds parameters, gradients and optimizer states",
    "[partition]\nkind = \"zero\"\nstage = 0"
);

zf_core::register_preset!(
    "zero-1",
    "ZeRO stage 1: optimizer states and masters split over the ranks",
    "[partition]\nkind = \"zero\"\nstage = 1"
);

zf_core::register_preset!(
    "zero-2",
    "ZeRO stage 2: optimizer states, masters and gradients split over the ranks",
    "[partition]\nkind = \"zero\"\nstage = 2"
);

zf_core::register_preset!(
    "zero-3",
    "ZeRO stage 3: optimizer states, masters, gradients and parameters split over the ranks",
    "[partition]\nkind = \"zero\"\nstage = 3"
);

zf_core::register_preset!(
    "fsdp",
    "fully sharded data parallelism: everything split over all ranks, which is ZeRO stage 3 written as scopes",
    "[partition]\nkind = \"zero\"\nscope = { p = \"world\", g = \"world\", o = \"world\" }"
);

zf_core::register_preset!(
    "hsdp",
    "hybrid sharding: everything split over the ranks of a node, each node a replica (needs transport.ranks_per_node)",
    "[partition]\nkind = \"zero\"\nscope = { p = \"node\", g = \"node\", o = \"node\" }"
);

// Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud", 2022, section 3: the smallest group
// that holds the model is the partition group. Its two-hop reduction (section 3.3) is how any scope below the world reduces.
zf_core::register_preset!(
    "mics",
    "MiCS: everything split over a small group of near ranks, here a node, and replicated over the groups; the same as hsdp",
    "[partition]\nkind = \"zero\"\nscope = { p = \"node\", g = \"node\", o = \"node\" }"
);

// Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, section 3.2, keeps a
// second copy inside each node for backward alone, and gathers across nodes in forward.
zf_core::register_preset!(
    "hpz",
    "parameters split over a node and gathered inside it in forward and backward; gradients and optimizer states split over \
     all ranks, updates sent across nodes once a step (ZeRO++ gathers across nodes in forward and keeps a node's copy for \
     backward only: zero-3 with reshard_after_forward = \"node\")",
    "[partition]\nkind = \"zero\"\nscope = { p = \"node\", g = \"world\", o = \"world\" }"
);

// Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021.
zf_core::register_preset!(
    "zero-offload",
    "ZeRO-Offload: masters and optimizer states in host memory, updated there after every backward",
    "[offload]\nkind = \"host\""
);

// Ren et al., "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates", 2025; its k and S.
zf_core::register_preset!(
    "zenflow",
    "ZenFlow: a tenth of the columns is updated on the device, the others by the host once in four steps, beside the next ones",
    "[offload]\nkind = \"zenflow\"\nupdate_interval = 4\nasynchronous = true\n\n[select]\nkind = \"topk\"\nratio = 0.1\nevery = 8"
);

#[cfg(test)]
mod tests {
    use zf_core::config::Run;

    /// Another offload than the preset's leaves nothing of the columns that the preset chooses, but all that was said of them
    /// elsewhere.
    #[test]
    fn columns_go_with_the_offload_of_a_preset() {
        let of = |sections: &str, overrides: &[&str]| {
            let text = format!(
                "preset = \"zenflow\"\n[model]\npath = \"m\"\n[data]\npath = \"d.txt\"\nsequence_length = 8\n[run]\nsteps = 1\n\
                 {sections}\n"
            );
            let registry = zf_core::registry::Registry::global().expect("no duplicates");
            let overrides: Vec<String> = overrides.iter().map(|&text| text.to_owned()).collect();
            let run = Run::from_toml_str_with(&text, "run.toml", &overrides, registry);
            let run = run.unwrap_or_else(|error| panic!("{error}"));
            let resolved: Run = Run::from_toml_str(&run.resolved_toml(), "again.toml").expect("what it resolves to");
            assert_eq!(resolved.given("select"), run.given("select"));
            ["select.ratio", "select.every", "select"].map(|key| run.given(key))
        };
        assert_eq!(of("", &[]), [true; 3]);
        assert_eq!(of("[offload]\nkind = \"zenflow\"\nupdate_interval = 2", &[]), [true; 3]);
        assert_eq!(of("[offload]\nkind = \"host\"", &[]), [false; 3]);
        assert_eq!(of("", &["offload.kind=host"]), [false; 3]);
        assert_eq!(of("", &["offload.kind=none", "offload.kind=zenflow"]), [false; 3]);
        // Said by the file itself, which may be a mistake.
        assert_eq!(of("[select]\nratio = 0.2", &["offload.kind=host"]), [true, false, true]);
        assert_eq!(of("[select]", &["offload.kind=host"]), [false, false, true]);
    }

    /// A stage written over the scopes of a preset takes their place, and the other way round.
    #[test]
    fn stage_and_scope_replace_each_other() {
        let of = |preset: &str, partition: &str| {
            let text = format!(
                "preset = {preset:?}\n[model]\npath = \"m\"\n[data]\npath = \"d.txt\"\nsequence_length = 8\n[run]\nsteps = 1\n\
                 [partition]\n{partition}\n"
            );
            let run = Run::from_toml_str(&text, "run.toml").unwrap_or_else(|error| panic!("{error}"));
            let (_, partition) =
                run.resolved().into_iter().find(|(section, _)| section == "partition").expect("it has a default");
            (partition.contains_key("stage"), partition.contains_key("scope"))
        };
        assert_eq!(of("fsdp", "prefetch = 2"), (false, true));
        assert_eq!(of("fsdp", "stage = 2"), (true, false));
        assert_eq!(of("zero-3", "scope = { p = 1, g = 2, o = 2 }"), (false, true));
    }
}
