"""Which name of which module of that library is what here. A name that is not in the table is not provided."""

_HERE = "phalanx.compat.sagemaker"
_DCP = "torch.sagemaker.distributed.checkpoint"

# Module -> name -> "module:name" of what it is, or the value itself where it is no text with a colon.
NAMES: dict[str, dict[str, str]] = {
    "torch.sagemaker": {
        "init": f"{_HERE}.start:init",
        "is_initialized": f"{_HERE}.start:is_initialized",
        "transform": f"{_HERE}.transforming:transform",
        "state": f"{_HERE}.state:STATE",
    },
    "torch.sagemaker.state_handler": {"state": f"{_HERE}.state:STATE"},
    "torch.sagemaker.logger": {"get_logger": f"{_HERE}.small:get_logger"},
    "torch.sagemaker.grad_norm": {"clip_grad_norm_": "phalanx.api.fsdp.clip_norm:clip_grad_norm_"},
    "torch.sagemaker.delayed_param": {"DelayedParamIniter": f"{_HERE}.delayed:DelayedParamIniter"},
    "torch.sagemaker.utils.module_utils": {
        "empty_module_params": f"{_HERE}.small:empty_module_params",
        "move_buffers_to_device": f"{_HERE}.small:move_buffers_to_device",
    },
    "torch.sagemaker.utils.process_group_utils": {"get_global_ranks": f"{_HERE}.small:get_global_ranks"},
    "torch.sagemaker.utils.utils": {"timeit": f"{_HERE}.small:timeit"},
    "torch.sagemaker.checkpoint.utils": {
        "limit_num_subdirs": f"{_HERE}.folders:limit_num_subdirs",
        "SORT_BY_LAST_INT": f"{_HERE}.folders:last_number",
    },
    "torch.sagemaker.checkpoint.constants": {
        "SMP_IS_LOAD_INFO_KEY": f"{_HERE}.folders:SMP_IS_LOAD_INFO_KEY",
        "SMP_IS_PARTIAL_KEY": f"{_HERE}.folders:SMP_IS_PARTIAL_KEY",
    },
    "torch.sagemaker.distributed.fsdp.checkpoint": {
        name: f"{_HERE}.fsdp_checkpoint:{name}"
        for name in (
            "save_model_checkpoint",
            "load_model_checkpoint",
            "EXPORT_KEY_MODEL",
            "EXPORT_KEY_OPTIMIZER",
            "EXPORT_KEY_SCHEDULER",
            "EXPORT_KEY_IDENTITY",
        )
    },
    f"{_DCP}.state_dict_saver": {
        "save": f"{_HERE}.saver:save",
        "async_save": f"{_HERE}.saver:async_save",
        "maybe_finalize_async_calls": f"{_HERE}.saver:maybe_finalize_async_calls",
        "PyTorchDistSaveShardedStrategy": f"{_HERE}.requests:PyTorchDistSaveShardedStrategy",
        "SaveShardedStrategy": f"{_HERE}.requests:SaveShardedStrategy",
        "AsyncCallsQueue": f"{_HERE}.requests:AsyncCallsQueue",
        "DEFAULT_ASYNC_REQUEST_QUEUE": f"{_HERE}.requests:DEFAULT_ASYNC_REQUEST_QUEUE",
    },
    f"{_DCP}.state_dict_loader": {"load": f"{_HERE}.loader:load"},
    f"{_DCP}.state_dict_utils": {
        "sm_state_dict_type": f"{_HERE}.local:sm_state_dict_type",
        "SMStateDictType": f"{_HERE}.local:SMStateDictType",
        "init_optim_state": f"{_HERE}.local:init_optim_state",
        "compute_auto_checkpoint_interval": f"{_HERE}.interval:compute_auto_checkpoint_interval",
        "_Interval": f"{_HERE}.interval:Interval",
    },
    f"{_DCP}.filesystem": {
        "DistributedFileSystemReader": f"{_HERE}.files:DistributedFileSystemReader",
        "DistributedFileSystemWriter": f"{_HERE}.files:DistributedFileSystemWriter",
        "path_to_file_system": f"{_HERE}.files:path_to_file_system",
    },
    f"{_DCP}.async_utils": {
        "AsyncCallsQueue": f"{_HERE}.requests:AsyncCallsQueue",
        "DEFAULT_ASYNC_REQUEST_QUEUE": f"{_HERE}.requests:DEFAULT_ASYNC_REQUEST_QUEUE",
    },
    f"{_DCP}.s3_filesystem": {
        "S3FileSystem": f"{_HERE}.s3:S3FileSystem",
        "is_s3_uri": f"{_HERE}.s3:is_s3_uri",
        "format_s3_path": f"{_HERE}.s3:format_s3_path",
        "retry_with_jitter": f"{_HERE}.files:retry_with_jitter",
    },
    "torch.sagemaker.moe.moe_config": {"MoEConfig": f"{_HERE}.transforming:MoEConfig"},
    "torch.sagemaker.moe.moe_layer": {"MoELayer": f"{_HERE}.transforming:MoELayer"},
    "torch.sagemaker.context_parallel.utils": {
        "setup_transformer_engine_cp_groups": f"{_HERE}.transforming:setup_transformer_engine_cp_groups",
    },
    "torch.sagemaker.tensor_parallel.transformer": {
        "TransformerLMHead": f"{_HERE}.transforming:TransformerLMHead",
        "TransformerLayer": f"{_HERE}.transforming:TransformerLayer",
        "TETransformerLayer": f"{_HERE}.transforming:TransformerLayer",
    },
    "torch.sagemaker.nn.attn": {
        "FlashSelfAttention": f"{_HERE}.attention:FlashSelfAttention",
        "FlashGroupedQueryAttention": f"{_HERE}.attention:FlashGroupedQueryAttention",
    },
    "torch.sagemaker.nn.huggingface.llama_flashattn": {"LlamaFlashAttention": f"{_HERE}.llama:LlamaFlashAttention"},
    "smdistributed.dataparallel.torch.torch_smddp": {},  # importing it makes the backend known
    # Only where Transformer Engine itself is not installed.
    "transformer_engine": {},
    "transformer_engine.common.recipe": {
        "Format": f"{_HERE}.absent:Format",
        "DelayedScaling": f"{_HERE}.absent:DelayedScaling",
    },
    "transformer_engine.pytorch": {
        name: f"{_HERE}.absent:{name}" for name in ("fp8_autocast", "Linear", "LayerNormLinear", "LayerNormMLP")
    },
}

# Modules of older versions: what to do instead.
INSTEAD = {
    "smdistributed.modelparallel": "version 1 of that library is another one; begin with a plain FSDP script",
    "smdistributed.dataparallel.torch.distributed": 'use torch.distributed with backend="smddp"',
    "smdistributed.dataparallel.torch.parallel": "use torch.nn.parallel.DistributedDataParallel",
}
# Packages that such scripts import besides, and that are not installed everywhere: what to do without.
WITHOUT = {
    "transformer_engine": "FP8 is its kernels' alone: leave it out (a script's own switch, such as --fp8 0) and train "
    "in bf16, by FSDP's MixedPrecision; or install it where GPUs have FP8",
}
ROOTS = ("torch.sagemaker", "smdistributed")
PAGE = "docs/migrating.md lists what is"
