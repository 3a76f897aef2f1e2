// Sfumato in the hub's menu "Use this model". Ready to be proposed once the package is published: both
// functions go into `packages/tasks/src/local-apps.ts` of huggingface/huggingface.js, before LOCAL_APPS,
// and the last lines into LOCAL_APPS. A test holds the names of families and the commands.

/** By GGUF's `general.architecture`, or by `model_type` of config.json. A GGUF file of `qwen3` may be an
 * autoregressive network, which Sfumato refuses. */
function isSfumatoModel(model: ModelData): boolean {
	return (
		["diffusion-gemma"].includes(model.gguf?.architecture ?? "") ||
		["diffusion_gemma", "sdar", "sdar_moe", "a2d-qwen3"].includes(model.config?.model_type ?? "")
	);
}

const snippetSfumato = (model: ModelData, filepath?: string): LocalAppSnippet[] => {
	const name = `hf:${model.id}${model.gguf ? getQuantTag(filepath) : ""}`;
	const setup = 'pip install "sfumato[hub]"';
	return [
		{
			title: "Chat, and watch every denoising step",
			setup,
			content: `sfumato chat -m ${name}`,
		},
		{
			title: "Start a server with OpenAI's API and a web page",
			setup,
			content: `sfumato serve -m ${name} --open`,
		},
		{
			title: "Which format fits this machine, and how fast is it?",
			setup,
			content: "sfumato doctor",
		},
	];
};

export const SFUMATO = {
	sfumato: {
		prettyLabel: "Sfumato",
		docsUrl: "https://pypi.org/project/sfumato/",
		mainTask: "text-generation",
		displayOnModelPage: isSfumatoModel,
		snippet: snippetSfumato,
	},
} satisfies Record<string, LocalApp>;
