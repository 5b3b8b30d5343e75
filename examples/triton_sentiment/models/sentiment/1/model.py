import json
import logging
import os

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast


class Tokenizer(PreTrainedTokenizerFast):
    # The article is older than transformers 5, which has no such method any more.
    batch_encode_plus = PreTrainedTokenizerFast.__call__


class TritonPythonModel:
    def initialize(self, args):
        device = "cuda" if args["model_instance_kind"] == "GPU" else "cpu"
        device_id = args["model_instance_device_id"]
        self.device = f"{device}:{device_id}"
        model_path = os.path.join(args["model_repository"], args["model_version"], "sentiment")
        self.model = BertForSequenceClassification.from_pretrained(model_path).to(self.device).eval()
        self.tokenizer = Tokenizer.from_pretrained(model_path)
        self.label_map = {0: "negative", 1: "positive"}
        output_config = pb_utils.get_output_config_by_name(json.loads(args["model_config"]), "prob")
        self.output_response_dtype = pb_utils.triton_string_to_numpy(output_config["data_type"])

    def execute(self, requests):
        print("---------requests in this call", len(requests))
        responses = []
        # TODO record the data of each request and the size of its batch
        batch_text, batch_len = [], []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
            text = np.char.decode(text, "utf-8").squeeze(1).tolist()
            batch_text.extend(text)
            batch_len.append(len(text))
        # log what came in
        in_log_info = {
            "text": batch_text,
        }
        logging.info(in_log_info)
        encoding = self.tokenizer.batch_encode_plus(
            batch_text,
            max_length=512,
            add_special_tokens=True,
            return_token_type_ids=False,
            padding=True,
            return_attention_mask=True,
            return_tensors='pt',
            truncation=True
        ).to(self.device)
        with torch.no_grad():
            outputs = self.model(**encoding)
            prob = torch.nn.functional.softmax(outputs.logits, dim=1).argmax(dim=1).detach().cpu().numpy().tolist()
            prob = np.array([self.label_map[x].encode("utf8") for x in prob])
        # log what goes out
        out_log_info = {
            "prob": prob
        }
        logging.info(out_log_info)
        # TODO there must be as many responses as requests
        start = 0
        for i in range(len(requests)):
            end = start + batch_len[i]
            out_tensor = pb_utils.Tensor("prob", np.array(prob[start:end]).astype(self.output_response_dtype))
            start += batch_len[i]
            final_inference_response = pb_utils.InferenceResponse(output_tensors=[out_tensor])
            responses.append(final_inference_response)
        return responses
